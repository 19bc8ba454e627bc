"""A real llama.cpp server in a process of its own, for tests and benchmarks (needs the ``xllamacpp`` package).

``python -m plait.testing_llama MODEL.gguf`` serves until killed and prints its base URL first.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def llama_server(model: Path, slots: int = 2, context_tokens: int = 2048, threads: int = 1) -> Iterator[str]:
    """Base URL (ending in /v1) of a server that lives as long as the context."""
    options = ["--slots", str(slots), "--context-tokens", str(context_tokens), "--threads", str(threads)]
    command = [sys.executable, "-m", "plait.testing_llama", str(model), *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        try:
            url = process.stdout.readline().strip()
            if not url:
                raise RuntimeError(f"the llama.cpp server did not start: {' '.join(command)}")
            yield url
        finally:
            process.kill()


def main() -> None:
    """Serve a GGUF file on a free port of 127.0.0.1."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--slots", type=int, default=2)
    parser.add_argument("--context-tokens", type=int, default=2048, help="KV cache, shared by the slots")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    reply = os.dup(1)
    os.dup2(2, 1)  # the library prints to stdout
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(options.model)
    params.n_ctx, params.n_parallel, params.kv_unified = options.context_tokens, options.slots, True
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = options.threads
    params.endpoint_metrics = params.endpoint_props = True
    params.warmup = False
    params.cache_ram_mib = 0  # prompts are kept in the slots only: the KV cache binds
    server = xllamacpp.Server(params)
    os.write(reply, f"{server.listening_address}/v1\n".encode())
    threading.Event().wait()


if __name__ == "__main__":
    main()
