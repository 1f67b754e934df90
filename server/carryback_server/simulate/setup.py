"""All that a simulation is of, and any of it changed by its name."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import yaml
from pydantic import ValidationError

from carryback_server.config import RouterConfig
from carryback_server.simulate.agents import Agent, Population
from carryback_server.simulate.profile import Profile
from carryback_server.simulate.run import Scenario


@dataclass(frozen=True)
class Setup:
    """Engines, router, agents.

    Attributes:
        recorded: agents of a trace, instead of the population's.
    """

    profile: Profile
    scenario: Scenario = field(default_factory=Scenario)
    router: RouterConfig = field(default_factory=lambda: RouterConfig.model_validate({}))
    population: Population = field(default_factory=Population)
    recorded: tuple[Agent, ...] | None = None

    def agents(self) -> Iterable[Agent]:
        """The agents, anew for each simulation."""
        if self.recorded is not None:
            return self.recorded
        return self.population.draw(self.scenario.seed, self.scenario.warmup_s)

    def but(self, **values: Any) -> Setup:
        """The same with other values of any of its parts, by their names. Texts are read as YAML.

        Raises:
            ValueError: there is no such name, or its value cannot be that; says which.
        """
        setup = self
        for name, value in values.items():
            setup = setup._with(name, yaml.safe_load(value) if isinstance(value, str) else value)
        return setup

    def _with(self, name: str, value: Any) -> Setup:
        if name in RouterConfig.model_fields:
            try:
                # Checked as a file's would be.
                router = RouterConfig.model_validate({**self.router.model_dump(), name: value})
            except ValidationError as error:
                raise ValueError(f"{name}: {error.errors(include_url=False)[0]['msg']}") from error
            return replace(self, router=router)
        for part in ("scenario", "population", "profile"):
            struct = getattr(self, part)
            if name in struct.__struct_fields__:
                try:
                    changed = msgspec.convert(
                        {**msgspec.structs.asdict(struct), name: value}, type(struct), strict=False
                    )
                except msgspec.ValidationError as error:
                    raise ValueError(f"{name}: {error}") from error
                return replace(self, **{part: changed})
        raise ValueError(f"{name} is no setting of the router, the engines, the agents or the simulation")
