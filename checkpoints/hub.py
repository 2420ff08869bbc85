"""Models of the Hugging Face Hub: the id of one (`org/name`, `org/name@revision`) as a directory of the local cache.

Downloads only what is read here: safetensors, JSON, tokenizer and template files. Without a network, the cached files
are used. Imports huggingface_hub only when an id is given, and no torch.
"""

import contextlib
import errno
import os
import re
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path, PureWindowsPath

from checkpoints.weight_files import SIDE_FILES, explain_other_format
from errors import UserError

# What is downloaded. In huggingface_hub `*` matches `/` too, so folders (original/, onnx/) are excluded separately.
WANTED, UNWANTED = ("model.safetensors", "model-*.safetensors", *SIDE_FILES), "*/*"
ID = re.compile(r"(\w[\w.-]*)/(\w[\w.-]*)(?:@(.+))?", re.ASCII)
DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@dataclass(frozen=True)
class HubModel:
    """A model at one revision."""

    name: str
    """org/name"""
    revision: str
    """A branch, a tag or a commit."""


def parse_id(text: str) -> HubModel | None:
    """The model that `text` names, or None if it is not an id.

    Nothing below an existing directory is an id, nor anything in runs/: a mistyped path must not start a download.
    """
    match = ID.fullmatch(text)
    if match is None or match[1] == "runs" or Path(match[1]).is_dir():
        return None
    return HubModel(f"{match[1]}/{match[2]}", match[3] or "main")


def cached_snapshot(folder: Path) -> Path | None:
    """The snapshot of main in a model's folder of the cache (models--org--name), or else the newest one, or None."""
    snapshots, main = folder / "snapshots", folder / "refs" / "main"
    if main.is_file() and (snapshot := snapshots / main.read_text("utf-8", "replace").strip()).is_dir():
        return snapshot
    return max(snapshots.glob("*"), key=lambda path: path.stat().st_mtime, default=None)


def download(model: HubModel) -> Path:
    """The directory of a model's files in the cache of huggingface_hub, after downloading those that it lacks."""
    import huggingface_hub
    from huggingface_hub import constants, snapshot_download, try_to_load_from_cache
    from huggingface_hub.utils import disable_progress_bars

    huggingface_hub.logging.set_verbosity_error()  # no warnings about retries: an error below says what failed
    place = {"repo_id": model.name, "revision": model.revision}
    try:
        info = huggingface_hub.HfApi().model_info(**place, files_metadata=True, timeout=10)
        names = {file.rfilename: int(file.size or 0) for file in info.siblings}
        sizes = {name: size for name, size in names.items() if PureWindowsPath(name).name == name}  # in no folder
    except Exception as error:  # a network fails in many ways, and each version of the library has other classes
        reason = explain(error, model, constants.ENDPOINT)
        if reason.final:
            raise UserError(reason.text) from None
        try:
            cached = snapshot_download(**place, local_files_only=True, allow_patterns=WANTED, ignore_patterns=UNWANTED)
        except Exception:
            raise UserError(reason.text) from None
        print(f"note: {reason.cause}; using the cached files of {model.name}, {cached}", file=sys.stderr)
        return Path(cached)
    if "config.json" not in sizes or not any(fnmatch(name, "model*.safetensors") for name in sizes):
        advice = explain_other_format(sizes) or "has no config.json and model.safetensors; give another model."
        raise UserError(f"{model.name} on the Hub {advice}")
    wanted = [name for name in sizes if any(fnmatch(name, pattern) for pattern in WANTED)]
    cached = {name: try_to_load_from_cache(model.name, name, revision=info.sha) for name in wanted}
    missing = [name for name, path in cached.items() if not isinstance(path, str)]
    if missing:
        size = sum(sizes[name] for name in missing) / 1e6
        print(f"downloading {model.name}: {len(missing)} files, {size:,.1f} MB", file=sys.stderr, flush=True)
    if not missing or not sys.stderr.isatty():
        disable_progress_bars()
    try:
        with stop_at_once():
            return Path(snapshot_download(**place, allow_patterns=WANTED, ignore_patterns=UNWANTED))
    except Exception as error:
        raise UserError(explain(error, model, constants.ENDPOINT).text) from None


@dataclass(frozen=True)
class Reason:
    """Why the Hub did not give a model's files."""

    text: str
    """The one-line error."""
    cause: str = ""
    """What went wrong, without advice."""
    final: bool = True
    """Whether cached files must not be used instead: the Hub has answered."""


def explain(error: Exception, model: HubModel, endpoint: str) -> Reason:
    """Why `error` was raised and what to do. The library wraps errors of the network and the disk: see the chain."""
    chain = [error]
    while (cause := chain[-1].__cause__) is not None:
        chain.append(cause)
    names = {type(link).__name__ for link in chain}
    if "HFValidationError" in names:
        return Reason(f"{model.name} is neither a local path nor a valid model id of the Hub; check the spelling.")
    status = next((link.response.status_code for link in chain if getattr(link, "response", None) is not None), None)
    log_in = "log in with `hf auth login` or set HF_TOKEN"
    if "GatedRepoError" in names or status == 403:
        return Reason(
            f"access to {model.name} is restricted (HTTP {status}); "
            f"accept its terms at {endpoint}/{model.name} and {log_in}."
        )
    if "RevisionNotFoundError" in names:
        return Reason(f"{model.name} has no revision {model.revision!r} (HTTP {status}); give another after the @.")
    if status in (401, 404):
        return Reason(
            f"{model.name} is no local path, and {endpoint} shows no model of this name (HTTP {status}); "
            f"check the spelling, or {log_in} if the model is private."
        )
    if any(isinstance(link, OSError) and link.errno in DISK_FULL for link in chain):
        return Reason(
            f"the disk is full ({chain[-1]}); free some space, or set HF_HOME to a folder on another disk, "
            f"and run the same command again."
        )
    if "OfflineModeIsEnabled" in names:
        return Reason(
            f"{model.name} is not in the cache, and HF_HUB_OFFLINE forbids downloading it; unset it.",
            "HF_HUB_OFFLINE is set",
            final=False,
        )
    first_line = str(chain[-1]).strip().partition("\n")[0].rstrip(".")
    cause = f"{endpoint} gave no answer ({type(chain[-1]).__name__}: {first_line})"
    return Reason(
        f"{model.name} is no local path and could not be downloaded: {cause}; check the connection and run the same "
        f"command again, which resumes the download.",
        cause,
        final=False,
    )


@contextlib.contextmanager
def stop_at_once() -> Iterator[None]:
    """Let Ctrl-C end the process immediately. The library's threads would first complete the files they have begun."""

    def stop(*_: object) -> None:
        print("\nstopped; the same command resumes the download.", file=sys.stderr, flush=True)
        os._exit(130)

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
