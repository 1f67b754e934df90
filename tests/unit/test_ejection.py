from __future__ import annotations

from carryback_server.ejection import Ejection
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

LIMIT, FIRST_S, MAX_S = 3, 10.0, 70.0


class EjectionLife(RuleBasedStateMachine):
    """An engine is out exactly from its third failure in a row until a trial works, for longer each time.

    After as many doubts in a row a trial decides, too.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.ejection = Ejection(failures=LIMIT, first_s=FIRST_S, max_s=MAX_S, clock=lambda: self.now)
        self.in_a_row = 0
        self.doubts = 0
        self.out_until: float | None = None
        self.last_wait = 0.0
        self.back = 0.0

    def put_out(self) -> None:
        expected = min(self.last_wait * 2, MAX_S) if self.last_wait else FIRST_S
        assert self.ejection.wait_s == expected
        self.last_wait = expected
        self.out_until = self.now + expected

    @rule(seconds=st.sampled_from([1.0, FIRST_S, 2 * FIRST_S, MAX_S]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def succeed(self) -> None:
        self.ejection.succeeded()
        self.in_a_row = self.doubts = 0

    @rule()
    def doubt(self) -> None:
        self.ejection.doubted()
        self.doubts += 1

    @rule(may_eject=st.booleans())
    def fail(self, may_eject: bool) -> None:
        was_out = self.out_until is not None
        is_ejected = self.ejection.failed(lambda: may_eject)
        self.in_a_row += 1
        assert is_ejected == (not was_out and may_eject and self.in_a_row >= LIMIT)
        if is_ejected:
            if self.now - self.back >= MAX_S:
                self.last_wait = 0.0
            self.put_out()

    @precondition(lambda self: self.ejection.is_due)
    @rule(worked=st.booleans(), may_eject=st.booleans())
    def try_it(self, worked: bool, may_eject: bool) -> None:
        is_ejected = self.ejection.tried(worked, lambda: may_eject)
        self.doubts = 0
        if self.out_until is None:  # it was only in doubt
            assert is_ejected == (may_eject and not worked)
            if is_ejected:
                if self.now - self.back >= MAX_S:
                    self.last_wait = 0.0
                self.put_out()
            return
        assert not is_ejected
        if worked:
            self.out_until, self.back = None, self.now
            self.in_a_row = LIMIT - 1  # one more failure puts it out again
        else:
            self.put_out()

    @rule()
    def restart(self) -> None:
        self.ejection.reset()
        self.in_a_row, self.out_until, self.last_wait, self.back = 0, None, 0.0, self.now
        self.doubts = 0

    @invariant()
    def tells_the_truth(self) -> None:
        assert self.ejection.is_out == (self.out_until is not None)
        is_over = self.out_until is not None and self.now >= self.out_until
        is_doubted = self.out_until is None and self.doubts >= LIMIT
        assert self.ejection.is_due == (is_over or is_doubted)


TestEjectionLife = EjectionLife.TestCase
