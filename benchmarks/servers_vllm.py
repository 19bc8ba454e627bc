"""A plain ``vllm serve`` in a process group of its own, for ``servers_real``.

PLAIT_VLLM_MODEL names a checkpoint (see ``gguf_to_hf.py``), PLAIT_VLLM_PYTHON the interpreter of the environment that
has vLLM; its CPU wheel is enough.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator

MAX_MODEL_LEN, BLOCK_TOKENS = 2048, 128
LOAD_S = 240.0
ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",  # offers /reset_prefix_cache
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


@contextlib.contextmanager
def vllm_server(name: str, kv_tokens: int) -> Iterator[Callable[[], str]]:
    """A function that clears the prefix cache and returns the server's base URL; requests call the model ``name``."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    root = f"http://127.0.0.1:{port}"
    python = os.environ.get("PLAIT_VLLM_PYTHON", sys.executable)
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", os.environ["PLAIT_VLLM_MODEL"]]
    command += ["--served-model-name", name, "--host", "127.0.0.1", "--port", str(port), "--enforce-eager"]
    command += ["--max-model-len", str(MAX_MODEL_LEN), "--num-gpu-blocks-override", str(kv_tokens // BLOCK_TOKENS)]
    command += ["--enable-prompt-tokens-details", "--dtype", "float32"]  # not every CPU has fast bfloat16
    quiet = subprocess.DEVNULL
    process = subprocess.Popen(command, stdout=quiet, stderr=quiet, env=os.environ | ENVIRONMENT, process_group=0)
    try:
        _wait_up(f"{root}/health", process)

        def fresh() -> str:
            urllib.request.urlopen(urllib.request.Request(f"{root}/reset_prefix_cache", method="POST")).close()
            return f"{root}/v1"

        yield fresh
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _wait_up(url: str, process: subprocess.Popen[bytes]) -> None:
    end_s = time.monotonic() + LOAD_S
    while True:
        if process.poll() is not None or time.monotonic() > end_s:
            raise RuntimeError(f"the vLLM server did not start: {' '.join(map(str, process.args))}")  # type: ignore[arg-type]
        with contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError):
            urllib.request.urlopen(url, timeout=5).close()
            return
        time.sleep(0.5)
