"""Hardware and networks that engines run on, and models, as data: what vLLM and NIXL are to be told.

`docs/deploy.md` shows the same as a table; a test compares it with what `carryback serve --dry-run` prints.
Only `cpu` was run by the project. What the others say comes from the sources named beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Role = Literal["prefill", "decode"]
Device = Literal["cpu", "cuda", "neuron"]
ProfileName = Literal["cpu", "nvlink", "infiniband", "efa", "trainium"]


@dataclass(frozen=True)
class Requirement:
    """Something that must be there before an engine starts.

    Attributes:
        kind: `path`: at least `count` paths match one of `names`, which are globs. `library`: the dynamic linker
            finds one of `names`. `module`: Python finds one of `names`. `memlock`: memory that may be locked
            is not limited.
        names: any of these will do.
        why: what it is for, and how to get it.
        count: of matching paths.
    """

    kind: Literal["path", "library", "module", "memlock"]
    names: tuple[str, ...]
    why: str
    count: int = 1


@dataclass(frozen=True)
class Profile:
    """How engines run on some hardware.

    Attributes:
        purpose: what it is for.
        device: what the engines compute on.
        args: vLLM options of both engines; the value is empty for one that is a flag.
        prefill_args, decode_args: more of them for one role.
        env: environment variables. `{threads}` and `{kv_cache_gib}` stand for CPU cores that an engine may
            have to itself, and for the setting `cpu_kv_cache_gib`.
        devices_variable: the environment variable that says which devices an engine has; empty: there are none.
        backends: NIXL's transports (`backends` in `kv_connector_extra_config`).
        kv_buffer_device: where NIXL reads and writes KV (`kv_buffer_device` in `--kv-transfer-config`).
        needs: to be checked before the start.
    """

    purpose: str
    device: Device
    args: Mapping[str, str] = field(default_factory=dict)
    prefill_args: Mapping[str, str] = field(default_factory=dict)
    decode_args: Mapping[str, str] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    devices_variable: str = ""
    backends: tuple[str, ...] = ("UCX",)
    kv_buffer_device: str = "cuda"
    needs: tuple[Requirement, ...] = ()

    def role_args(self, role: Role) -> Mapping[str, str]:
        """The vLLM options of an engine."""
        return {**self.args, **(self.prefill_args if role == "prefill" else self.decode_args)}


@dataclass(frozen=True)
class Recipe:
    """How a model runs in a profile.

    Attributes:
        tensor_parallel: GPUs of an engine, by profile; in others the model does not fit, or it is not known.
            One number for both roles: KV is carried back between engines of equal tensor parallelism only.
        args: vLLM options of both engines.
        weights_gb: of the weights, 10^9 bytes.
        kv_bytes_per_token: in all GPUs of an engine together.
        notes: what to know, with the sources of the numbers.
    """

    tensor_parallel: Mapping[str, int]
    args: Mapping[str, str]
    weights_gb: float
    kv_bytes_per_token: int
    notes: str


_VLLM = Requirement("module", ("vllm",), "the engine: pip install 'carryback[gpu]'; for a CPU, make install")
_NIXL = Requirement(
    "module", ("nixl", "nixl_cu12", "nixl_cu13"), "moves KV between engines: pip install nixl"
)
_GPU = Requirement("path", ("/dev/nvidia[0-9]*", "/dev/dxg"), "an NVIDIA GPU with its driver")
_VERBS = Requirement(
    "path",
    ("/dev/infiniband/uverbs*",),
    "the network's RDMA devices; a container has to be given them, in Kubernetes by a device plug-in",
)
# Memory is pinned for the network: https://docs.kernel.org/infiniband/user_verbs.html
_MEMLOCK = Requirement(
    "memlock", (), "memory is locked for RDMA: ulimit -l unlimited, LimitMEMLOCK=infinity in systemd"
)
# NIXL's wheel has its LIBFABRIC plug-in, but neither of these two (ldd, nixl-cu12 1.5.1). Versions: NIXL,
# src/plugins/libfabric/README.md.
_LIBFABRIC = Requirement(
    "library",
    ("libfabric.so.1",),
    "libfabric 1.21 or later, from AWS's EFA installer; its folder (/opt/amazon/efa/lib) must be in "
    "LD_LIBRARY_PATH",
)
_HWLOC = Requirement("library", ("libhwloc.so.15",), "hwloc 2.10 or later: the system's package libhwloc15")

PROFILES: dict[str, Profile] = {
    "cpu": Profile(
        purpose="no GPU: a laptop, tests, CI",
        device="cpu",
        args={
            "--dtype": "float32",  # bfloat16 is many times slower without AVX-512
            "--block-size": "32",  # the CPU's attention wants a multiple of 32
            "--enforce-eager": "",  # compiling takes a minute a start, and gains little here
        },
        env={
            # Engines, each with a NIXL thread, and the router share the cores; threads bound to the same
            # core or spinning for each other make them many times slower.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "{threads}",
            "OMP_WAIT_POLICY": "passive",
            "VLLM_CPU_KVCACHE_SPACE": "{kv_cache_gib}",
        },
        kv_buffer_device="cpu",
        needs=(_VLLM, _NIXL),
    ),
    "nvlink": Profile(
        purpose="one node with 2 GPUs, a prefill and a decode engine",
        device="cuda",
        # UCX, docs/source/faq.md: who names transports names those of GPUs, too. cuda_ipc is what goes over
        # NVLink; sm and tcp carry the small messages of two processes on a host. Naming no RDMA device keeps
        # UCX from going out of the host and back.
        env={"UCX_TLS": "cuda_ipc,cuda_copy,sm,tcp"},
        devices_variable="CUDA_VISIBLE_DEVICES",
        needs=(
            _VLLM,
            _NIXL,
            Requirement("path", ("/dev/nvidia[0-9]*",), "a GPU for each of the two engines", count=2),
        ),
    ),
    "infiniband": Profile(
        purpose="several nodes with InfiniBand or RoCE, GPUDirect RDMA",
        device="cuda",
        # rc brings what it needs to connect (UCX, docs/source/faq.md). Without tcp in the list an engine on a
        # machine without RDMA fails at its start (tried with nixl-cu12 1.5.1), instead of being slow.
        env={"UCX_TLS": "rc,cuda_ipc,cuda_copy,sm"},
        devices_variable="CUDA_VISIBLE_DEVICES",
        needs=(
            _VLLM,
            _NIXL,
            _GPU,
            _VERBS,
            Requirement(
                "path", ("/sys/class/infiniband/*",), "an InfiniBand or RoCE adapter with its driver"
            ),
            Requirement(
                "path",
                ("/sys/module/nvidia_peermem", "/sys/module/nv_peer_mem"),
                "GPUDirect RDMA: modprobe nvidia_peermem. (Not needed where the driver exports dma-buf: open "
                "kernel modules, Linux 5.12 or later.)",
            ),
            _MEMLOCK,
        ),
    ),
    "efa": Profile(
        purpose="AWS, several nodes with EFA: P5en (8 H200, 16 EFA interfaces), P5, P6",
        device="cuda",
        # fi_efa(7): 1 makes a device without RDMA an error; without it libfabric emulates reads with messages.
        # fi_fabric(7): FI_PROVIDER leaves no other provider to fall back to.
        env={"FI_PROVIDER": "efa", "FI_EFA_USE_DEVICE_RDMA": "1"},
        devices_variable="CUDA_VISIBLE_DEVICES",
        backends=("LIBFABRIC",),
        needs=(
            _VLLM,
            _NIXL,
            _GPU,
            _LIBFABRIC,
            _HWLOC,
            _VERBS,
            # Names of EFA devices with and without rdma-core's renaming.
            Requirement(
                "path",
                ("/sys/class/infiniband/rdmap*", "/sys/class/infiniband/efa_*"),
                "an EFA interface: attach them when the instance is launched (InterfaceType efa), and let the "
                "security group talk to itself",
            ),
            _MEMLOCK,
        ),
    ),
    "trainium": Profile(
        purpose="AWS Trainium (trn2) with EFA: KV goes through host memory",
        device="neuron",
        env={"FI_PROVIDER": "efa", "FI_EFA_USE_DEVICE_RDMA": "1"},
        devices_variable="NEURON_RT_VISIBLE_CORES",
        backends=("LIBFABRIC",),
        # github.com/vllm-project/vllm-neuron/issues/26: device memory to host memory, then LIBFABRIC over EFA.
        kv_buffer_device="cpu",
        needs=(
            _VLLM,
            Requirement(
                "module", ("vllm_neuron",), "vLLM's Neuron plug-in, github.com/vllm-project/vllm-neuron"
            ),
            _NIXL,
            Requirement("path", ("/dev/neuron[0-9]*",), "a Neuron device with its driver (aws-neuronx-dkms)"),
            _LIBFABRIC,
            _HWLOC,
            _VERBS,
            _MEMLOCK,
        ),
    ),
}

RECIPES: dict[str, Recipe] = {
    "Qwen/Qwen3-32B": Recipe(
        tensor_parallel={"nvlink": 1, "infiniband": 2, "efa": 2},
        args={
            # Any multiple of 16; a record names each block, so small blocks make large records.
            "--block-size": "64",
            "--max-model-len": "32768",  # trained for; 131072 with YaRN (model card)
            "--gpu-memory-utilization": "0.9",
            "--enable-auto-tool-choice": "",
            "--tool-call-parser": "hermes",  # qwen.readthedocs.io, function calling
            "--reasoning-parser": "qwen3",
        },
        weights_gb=65.5,  # 32.8e9 parameters (model card), bfloat16
        kv_bytes_per_token=262_144,  # 64 layers x 8 heads x 128 x 2 (K, V) x 2 bytes (config.json)
        notes="One GPU needs more than 80 GB: 0.9 x 80 GB leaves 6.5 GB, or 25,000 tokens, for KV; 0.9 x 141 GB "
        "leaves 61 GB, or 235,000 tokens.",
    ),
    "zai-org/GLM-5-FP8": Recipe(
        tensor_parallel={"infiniband": 8, "efa": 8},  # 8 H200: recipes.vllm.ai/zai-org/GLM-5
        args={
            "--block-size": "64",  # what the sparse MLA kernels take (vLLM, flashmla_sparse.py)
            "--gpu-memory-utilization": "0.9",
            "--enable-auto-tool-choice": "",
            # docs.vllm.ai/projects/recipes, GLM/GLM5
            "--tool-call-parser": "glm47",
            "--reasoning-parser": "glm45",
            "--chat-template-content-format": "string",
        },
        weights_gb=754,  # 754e9 parameters (Hugging Face), FP8
        # Each GPU has all of it: 78 layers x ((512 + 64) x 2 bytes of MLA + 132 of the indexer) (config.json;
        # vLLM's indexer keeps 128 bytes and a scale of 4), x 8.
        kv_bytes_per_token=8 * 78 * (576 * 2 + 132),
        notes="8 x 0.9 x 141 GB leave 261 GB for KV, of which each GPU's share holds the same tokens: 326,000.",
    ),
}

# GPUs and nothing known of what is between them: UCX takes what it finds.
_CUDA = Profile(purpose="GPUs", device="cuda", devices_variable="CUDA_VISIBLE_DEVICES")


def find(name: ProfileName | None, device: Device) -> Profile:
    """The profile of this name; without one, what is right for a device whatever its network."""
    if name is not None:
        return PROFILES[name]
    return PROFILES["cpu"] if device == "cpu" else _CUDA


def recipe_args(name: ProfileName | None, model: str | None) -> Mapping[str, str]:
    """vLLM options for a model in a profile; none if there is no recipe for the two."""
    recipe = RECIPES.get(model or "")
    if recipe is None or name is None or name not in recipe.tensor_parallel:
        return {}
    return {"--tensor-parallel-size": str(recipe.tensor_parallel[name]), **recipe.args}
