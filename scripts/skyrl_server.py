"""skyrl's server of the Tinker protocol on the loopback interface, for scripts/try_skyrl.py.

What is not as its authors ship it: skyrl starts its engine through `uv run`, here this file starts it; and on Python
3.11 pydantic refuses `typing.TypedDict`, so `typing_extensions` takes its place. Nothing of its maths changes.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

START = 180.0
"""Seconds for the API to answer."""


def serve(part: str, arguments: list[str]) -> None:
    """Run skyrl's API, or its engine, in this process."""
    if sys.version_info < (3, 12):
        import typing

        import typing_extensions

        typing.TypedDict = typing_extensions.TypedDict
    if part == "engine":
        from skyrl.tinker import engine

        sys.argv = ["engine", *arguments]
        engine.main()
        return
    import uvicorn
    from skyrl.tinker import api
    from skyrl.tinker.config import EngineConfig, add_model, config_to_argv

    parser = argparse.ArgumentParser()
    add_model(parser, EngineConfig)
    parser.add_argument("--port", type=int)
    args = vars(parser.parse_args(arguments))
    port = args.pop("port")
    own = [sys.executable, __file__, "engine"]
    api._build_uv_run_cmd_engine = lambda _, config: [*own, *config_to_argv(config)]
    api.app.state.engine_config = EngineConfig.model_validate(args)
    uvicorn.run(api.app, host="127.0.0.1", port=port, log_level="warning")


@contextmanager
def server(model: Path, folder: Path) -> Iterator[str]:
    """The address of a server for as long as the context lasts; its processes end with it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url, log = f"http://127.0.0.1:{port}", folder / "server.log"
    command = [sys.executable, __file__, "api", "--base-model", str(model), "--port", str(port)]
    command += ["--checkpoints-base", str(folder / "checkpoints"), "--database-url", f"sqlite:///{folder}/tinker.db"]
    command += ["--backend-config", '{"max_lora_adapters": 4, "max_lora_rank": 8}']
    own = {"JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    own["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
    with log.open("w") as lines:
        process = subprocess.Popen(
            command, stdout=lines, stderr=lines, env={**os.environ, **own}, start_new_session=True
        )
        try:
            wait_for(url, process)
            yield url
        except BaseException:
            lines.flush()
            print("last lines of the server:\n" + "\n".join(log.read_text().splitlines()[-30:]), file=sys.stderr)
            raise
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def wait_for(url: str, process: subprocess.Popen[bytes]) -> None:
    """Wait until the API answers; the engine may still be loading, requests wait for it."""
    end = time.monotonic() + START
    while time.monotonic() < end:
        if process.poll() is not None:
            raise SystemExit(f"the server ended with status {process.returncode}")
        try:
            with urllib.request.urlopen(f"{url}/api/v1/healthz", timeout=5):
                return
        except OSError:
            time.sleep(1)
    raise SystemExit(f"the server did not answer within {START:g} s")


def make_model(folder: Path) -> Path:
    """A tiny Qwen3 with random weights and a tokenizer trained here, as transformers stores them."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    from klamp.tinker.testing import tiny_model

    words = Tokenizer(models.WordLevel(unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    text = " ".join(str(i) for i in range(62))
    words.train_from_iterator([text], trainers.WordLevelTrainer(vocab_size=64, special_tokens=["<unk>", "<eos>"]))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", eos_token="<eos>").save_pretrained(folder)
    tiny_model().save_pretrained(folder)
    return folder


if __name__ == "__main__":
    serve(sys.argv[1], sys.argv[2:])
