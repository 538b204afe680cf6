"""Where a published checkpoint lies: in a folder here, or on the Hugging Face Hub."""

import os
import re
from pathlib import Path

from toolkit._checks import checked

PUBLISHED = re.compile(r"[\w.-]+/[\w.-]+")
"""The names of models on the Hub, "owner/name"."""

# Weights in the root alone: subfolders and "consolidated" files hold the same numbers again.
READ = ("*.safetensors", "*.json", "*.model", "*.txt", "*.jinja")
UNREAD = ("*/*", "consolidated*")


@checked
def checkpoint_folder(source: str | Path) -> Path:
    """The path of a checkpoint: a file or folder here, or "owner/name" on the Hugging Face Hub.

    The Hub's files are downloaded once, into the cache of `huggingface_hub` (extra `hub`), which
    HF_HOME moves; HF_HUB_OFFLINE=1 reads the cache alone.

    Args:
        source: a path, or "owner/name" if there is no such path.

    Returns:
        The path, or the folder of the snapshot in the cache.

    Raises:
        FileNotFoundError: there is neither a path nor a readable model of this name.
        ImportError: the library is not installed.

    Cost: a download of all weights, the first time.

    Example:
        >>> checkpoint_folder("no/such/folder")
        Traceback (most recent call last):
        FileNotFoundError: source: no file or folder at 'no/such/folder'
    """
    name = os.fspath(source)
    if Path(source).exists():
        return Path(source)
    if not PUBLISHED.fullmatch(name):
        raise FileNotFoundError(f"source: no file or folder at {name!r}")
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise ImportError(
            f"source: no folder at {name!r}, and huggingface_hub, which would look for it on the "
            "Hub, is missing: pip install 'mlsys-toolkit[hub]'"
        ) from None
    try:
        return Path(snapshot_download(name, allow_patterns=[*READ], ignore_patterns=[*UNREAD]))
    except Exception as error:  # without a network, a cache or a permission: of many classes
        reason = str(error).strip().split("\n")[0]
        raise FileNotFoundError(
            f"source: no folder at {name!r}, and the Hugging Face Hub did not give it ({reason})"
        ) from None
