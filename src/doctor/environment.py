"""Which environment variables a report shows, and what must never stand in one.

Values are shown of an allow-list only. Before it is published the whole text is searched for secrets once more.
"""

import re
from collections.abc import Mapping

#: Shown with their values: they change how torch.distributed, NCCL, gloo, OpenMP, CUDA or a tracker behave.
SHOWN = (
    *("CUDA_DEVICE_ORDER", "CUDA_LAUNCH_BLOCKING", "CUDA_MODULE_LOADING", "CUDA_VISIBLE_DEVICES"),
    *("NVIDIA_VISIBLE_DEVICES", "CUBLAS_WORKSPACE_CONFIG", "NVIDIA_TF32_OVERRIDE", "PYTORCH_ALLOC_CONF"),
    *("PYTORCH_CUDA_ALLOC_CONF", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK"),
    *("MASTER_PORT", "TORCHELASTIC_RESTART_COUNT", "TORCH_CPP_LOG_LEVEL", "TORCH_DISTRIBUTED_DEBUG"),
    *("TORCH_LOGS", "TORCH_SHOW_CPP_STACKTRACES", "TORCH_NCCL_ASYNC_ERROR_HANDLING"),
    *("TORCH_NCCL_BLOCKING_WAIT", "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", "TORCH_NCCL_TRACE_BUFFER_SIZE"),
    *("TORCH_NCCL_AVOID_RECORD_STREAMS", "NCCL_ALGO", "NCCL_BUFFSIZE", "NCCL_CROSS_NIC", "NCCL_DEBUG"),
    *("NCCL_DEBUG_SUBSYS", "NCCL_IB_DISABLE", "NCCL_IB_GID_INDEX", "NCCL_IB_HCA", "NCCL_IB_TIMEOUT"),
    *("NCCL_MAX_NCHANNELS", "NCCL_MIN_NCHANNELS", "NCCL_NET", "NCCL_NET_GDR_LEVEL", "NCCL_NVLS_ENABLE"),
    *("NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL", "NCCL_PROTO", "NCCL_SHM_DISABLE", "NCCL_SOCKET_FAMILY"),
    *("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "OMP_NUM_THREADS", "OMP_PROC_BIND"),
    *("OMP_PLACES", "OMP_SCHEDULE", "MKL_NUM_THREADS", "KMP_AFFINITY", "KMP_BLOCKTIME", "GOMP_CPU_AFFINITY"),
    *("OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS", "MALLOC_ARENA_MAX", "PYTHONFAULTHANDLER"),
    *("PYTHONHASHSEED", "SLURM_JOB_NUM_NODES", "SLURM_LOCALID", "SLURM_NNODES", "SLURM_NODEID"),
    *("SLURM_NTASKS", "SLURM_PROCID", "WANDB_MODE", "WANDB_SILENT", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"),
    *("TOKENIZERS_PARALLELISM", "DS_ACCELERATOR"),
)

#: Said to be set, without their values, which hold secrets, addresses or paths.
ONLY_NAMED = (
    *("WANDB_API_KEY", "WANDB_BASE_URL", "WANDB_DIR", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HOME"),
    *("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "all_proxy"),
    *("no_proxy", "MASTER_ADDR", "LD_PRELOAD", "LD_LIBRARY_PATH"),
)
#: Others of these families are named as well: they change the same things.
FAMILIES = ("NCCL_", "GLOO_", "TORCH_", "OMP_", "KMP_", "CUDA_", "DS_", "UCX_", "FI_")

HIDDEN = "set (value not shown)"
SECRET_NAME = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL|AUTH|COOKIE", re.IGNORECASE)
USER_IN_URL = re.compile(r"://[^/\s@]+@")
MIN_SECRET = 8  # characters; a shorter value (AUTH_MODE=none) would blot out ordinary words


def shown(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that matter to a run: value, or only that they are set."""
    found = {name: environ[name] for name in SHOWN if name in environ}
    for name in sorted(environ):
        if name not in found and (name in ONLY_NAMED or name.startswith(FAMILIES)):
            found[name] = HIDDEN
    return dict(sorted(found.items()))


def redacted(text: str, environ: Mapping[str, str], home: str, user: str) -> str:
    """`text` without what the environment's secrets say, users of URLs, the user's home and name in paths.

    A second barrier: nothing of the kind should have come this far.
    """
    secrets = {value for name, value in environ.items() if SECRET_NAME.search(name) and len(value) >= MIN_SECRET}
    for name, value in environ.items():
        if name.lower().endswith("_proxy") and (match := re.search(r"://([^/\s@]+)@", value)):
            secrets.update(part for part in match[1].split(":") if len(part) >= MIN_SECRET)
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, "***")
    text = USER_IN_URL.sub("://***@", text)
    if len(home) > 1:
        text = re.sub(rf"{re.escape(home.rstrip('/'))}(?![\w.-])", "~", text)
    return re.sub(rf"(?<=/){re.escape(user)}(?=[/\s'\"]|$)", "<user>", text) if user else text
