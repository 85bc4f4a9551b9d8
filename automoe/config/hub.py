"""HuggingFace Hub models by id, pinned to a commit and cached by huggingface_hub.

An id is ``OWNER/NAME`` or ``OWNER/NAME@REVISION``; a pinned id ends in ``@`` and the 40 digits of
a commit. A resolved configuration holds only pinned ids, so their meaning never changes and every
machine finds its own cached copy.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from automoe.config.paths import user_path
from automoe.errors import ConfigError, listed, one_line, say
from automoe.storage.files import read_file, wrong_kind
from automoe.storage.foreign import parse_json

_ID = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*?)(?:@([\w./-]+?))??(?:@([0-9a-f]{40}))?")
# Patterns of the files that describe a model and its tokenizer; pickles and code are excluded.
_SMALL = ["*.json", "*.jinja", "vocab.txt", "merges.txt", "*.model"]
SILENT_S = 10.0  # a Hub that says nothing for so long is out of reach
_WAIT_S = 300  # longest wait that the Hub may ask for; its limits count windows of five minutes
_COPIES = ["*/*.json", "*/*.model"]  # other formats and older steps, in folders of their own


def local_folder(spec: str | Path) -> Path:
    """Return the local folder of ``spec``: a path with ``~`` expanded, or a Hub id's folder in the cache.

    Only ``OWNER/NAME@COMMIT`` counts as an id. The folder need not exist; nothing is downloaded.
    """
    if (pin := id_and_commit(str(spec))) is None:
        return user_path("path", spec)
    return _cache_of(pin[0]) / "snapshots" / pin[1]


def _cache_of(name: str) -> Path:
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(HF_HUB_CACHE, f"models--{name.replace('/', '--')}")


def is_data_set(path: str) -> bool:
    """Return True if ``path`` is a directory that ``datasets`` saved, or the id of a Hub data set.

    ``OWNER/NAME`` counts as an id only if neither that path nor a folder OWNER exists, and NAME
    does not end like a data file (``.jsonl``).
    """
    folder = Path(path).expanduser()
    match = _ID.fullmatch(path)
    if folder.exists():
        return any((folder / name).is_file() for name in ("state.json", "dataset_dict.json"))
    # A mistyped file name must not query the Hub.
    file = folder.suffix in (".json", ".jsonl", ".parquet", ".gz", ".zst")
    return match is not None and "@" not in path and not file and not folder.parent.exists()


def id_and_commit(spec: str) -> tuple[str, str] | None:
    """Return (OWNER/NAME, commit) of a Hub id with a commit; None for a path or another id."""
    match = _ID.fullmatch(spec)
    return (
        (match[1], match[3])
        if match and match[3] and not Path(spec).expanduser().exists()
        else None
    )


def pinned(key: str, spec: str, earlier_commit: str = "") -> str:
    """Return a Hub id as ``OWNER/NAME@COMMIT``, or a path unchanged.

    Config and tokenizer of the id are downloaded if the cache lacks them.

    ``spec`` counts as an id if it looks like one and no such folder exists. Without a revision, no
    folder ``OWNER`` may exist either, so that a mistyped path does not query the Hub. If the commit
    was not known before, a line on stderr names it.

    Args:
        key: config key of ``spec``, for error messages.
        spec: path, ``OWNER/NAME`` or ``OWNER/NAME@REVISION``.
        earlier_commit: id with commit that an earlier start of the run used. If ``spec`` names the
            same model without a revision, that commit is taken.

    Raises:
        ConfigError: the model is not cached and the Hub cannot be reached, or the Hub has no
            such model or revision, or it has neither config.json nor tokenizer_config.json.
    """
    match = _ID.fullmatch(spec)
    if match is None or user_path(key, spec).exists():
        return spec
    name, revision, commit = match.groups()
    if not (revision or commit):
        if Path(name.partition("/")[0]).is_dir():
            return spec
        if (before := id_and_commit(earlier_commit)) is not None and before[0] == name:
            commit = before[1]
    folder = download(key, name, commit or revision or "main", _SMALL)
    if not (
        commit or (folder / "config.json").is_file() or (folder / "tokenizer_config.json").is_file()
    ):
        raise _refused(key, spec, f"{folder} has neither config.json nor tokenizer_config.json")
    if commit is None:
        say(
            f"{key}={spec}: no such folder here; taking the model from the Hub, at commit {folder.name[:12]}"
        )
    return f"{name}@{folder.name}"


def download(key: str, name: str, revision: str, files: list[str]) -> Path:
    """Download the files of a model that match the patterns ``files``; return its cache folder.

    Processes on one machine may download the same file: huggingface_hub locks it. If the Hub cannot
    be asked for the model's files, a cached copy is used as it is, and a note says so.

    Args:
        key: config key of the model, for errors.
        name: ``OWNER/NAME``.
        revision: commit, branch or tag.

    Raises:
        ConfigError: the model is not cached, and the Hub does not give it.
    """
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import FileMetadataError

    options: dict[str, Any] = {
        "revision": revision,
        "allow_patterns": files,
        "ignore_patterns": _COPIES,
    }
    place = _cache_of(name)
    listing = place / "trees" / f"{revision}.json"
    try:
        for file in (place / "refs" / revision, *place.glob("trees/*.json")):
            # huggingface_hub would read it, and a FIFO has no end
            if (kind := wrong_kind(file)) is not None:
                raise ValueError(f"{file} is {kind}, not a file")
            if file.suffix == ".json":
                _listed_sizes(file)
    except (OSError, ValueError) as error:
        raise _refused(key, f"{name}@{revision}", str(error)) from error
    bound_waits()
    cached = None
    before = set(place.resolve().rglob("*"))
    with contextlib.suppress(Exception):
        folder = Path(snapshot_download(name, local_files_only=True, **options))
        if files is _SMALL or all((folder / file).exists() for file in files):
            cached = folder
    # A commit never changes, and huggingface_hub has compared the folder with the list.
    if cached and len(revision) == 40 and listing.is_file():
        return cached
    try:
        HfApi().model_info(name, revision=revision, timeout=SILENT_S)
        folder = Path(snapshot_download(name, **options))
        listing = place / "trees" / f"{folder.name}.json"
        if listing.is_file():  # the library ignores a disk that has no room for it
            _check_sizes(folder, listing, before)
        return folder
    except Exception as error:  # the library's own, those of its HTTP client, of the disk
        if cached is None or isinstance(error, FileMetadataError):
            raise _refused(key, f"{name}@{revision}", error) from error
        note = f"note: {cached} is used as it is: the Hub did not say which files the model has"
        say(f"{note} ({one_line(error)})")
        return cached


def bound_waits() -> None:
    """Give HTTP requests of huggingface_hub that have no timeout one of ``SILENT_S`` (10) seconds.

    If a server asks to retry after more than ``_WAIT_S`` (300) seconds, the request fails instead.
    """
    from huggingface_hub.errors import HfHubHTTPError
    from huggingface_hub.utils import get_session

    def end_silence(request: Any) -> None:
        waits = request.extensions["timeout"]
        waits |= {part: seconds or SILENT_S for part, seconds in waits.items()}

    def end_pause(answer: Any) -> None:
        pause = answer.headers.get("Retry-After", "")
        if pause.isdigit() and int(pause) > _WAIT_S:
            raise HfHubHTTPError(
                f"{answer.status_code} {answer.reason_phrase}, come back in {pause} s",
                response=answer,
            )

    session = get_session()
    hooks = session.event_hooks
    if not any(hook.__name__ == "end_pause" for hook in hooks["response"]):
        session.event_hooks = {
            "request": [*hooks["request"], end_silence],
            "response": [*hooks["response"], end_pause],
        }


def _listed_sizes(listing: Path) -> dict[str, int]:
    """Return file name -> bytes of a commit, from the JSON list in huggingface_hub's cache.

    Raises ``ValueError`` for a damaged list.
    """
    with contextlib.suppress(AttributeError, LookupError, TypeError, ValueError):
        files = parse_json(read_file(listing))["files"]
        return {name: int(facts["size"]) for name, facts in files.items()}
    raise ValueError(f"{listing} is not a list of a commit's files. Delete it")


def _check_sizes(folder: Path, listing: Path, before: set[Path]) -> None:
    """Raise ``FileMetadataError`` if a downloaded file has another size than the Hub lists.

    Such files and the list itself, which may be wrong, are then deleted, to be downloaded again.

    Args:
        folder: the commit's folder in the cache.
        listing: JSON file with the sizes.
        before: files that the cache had before the download; these are not deleted.
    """
    from huggingface_hub.errors import FileMetadataError

    wrong = [
        folder / name
        for name, size in _listed_sizes(listing).items()
        if (folder / name).is_file() and (folder / name).stat().st_size != size
    ]
    said = f"the Hub lists other sizes for {listed(wrong)}"
    place = listing.parents[1].resolve()
    for file in wrong:
        if file.resolve() in before:
            said += f". Delete {file.resolve()}"
        for path in {file.resolve(), file} - before:
            if path.parent.resolve().is_relative_to(place):
                path.unlink(missing_ok=True)
    if wrong:
        listing.unlink()
        raise FileMetadataError(said)


def fetch(key: str, spec: str, missing: list[str]) -> None:
    """Download the files named ``missing`` into the Hub's cache on this machine; print their size before.

    Args:
        key: config key of ``spec``, for error messages.
        spec: repository with its commit, as ``pinned`` returns it.

    Raises:
        ConfigError: the Hub cannot be reached, or lacks one of the files.
    """
    from huggingface_hub import HfApi, constants

    pin = id_and_commit(spec)
    assert pin is not None, spec
    try:
        there = HfApi().model_info(pin[0], revision=pin[1], files_metadata=True, timeout=SILENT_S)
    except Exception as error:
        raise _refused(key, spec, error, missing) from error
    sizes = {file.rfilename: file.size or 0 for file in there.siblings or ()}
    if lost := [file for file in missing if file not in sizes]:
        raise ConfigError(
            key, spec, f"the Hub lacks its {lost[0]}", "Choose a model with safetensors files"
        )
    total = sum(sizes[file] for file in missing)
    size = f"{len(missing)} files, {total / 1e9:,.1f} GB"
    say(f"downloading {spec}: {size}, to {constants.HF_HUB_CACHE}")
    download(key, *pin, missing)


def remedy_of(error: BaseException, path: str) -> str | None:
    """Return advice on an error of a request to the Hub; None for errors without advice, such as no answer at all.

    Args:
        path: requested path of the Hub, such as ``OWNER/NAME``.
    """
    from huggingface_hub import constants, errors

    page = f"{constants.ENDPOINT}/{path}"
    login = "log in (hf auth login, or HF_TOKEN)"
    if isinstance(error, errors.GatedRepoError):
        return f"Accept the terms at {page}, and {login}"
    if isinstance(error, (errors.RepositoryNotFoundError, errors.RevisionNotFoundError)):
        return f"Correct the name or the revision; for a private repository {login}"
    if "CERTIFICATE_VERIFY" in str(error):
        return "Set SSL_CERT_FILE to the certificates of this network's proxy"
    status = getattr(getattr(error, "response", None), "status_code", 0)
    if status in (401, 403):
        return f"With a token that can read {page}, {login}"
    if status == 429:
        return f"Start again later, or {login}: the Hub then allows more requests"
    if status >= 500:
        return "The Hub is failing (status.huggingface.co): start again later"
    odd = isinstance(error, (json.JSONDecodeError, errors.FileMetadataError))
    if status or odd or "redirects" in str(error):
        return (
            f"Open {page} in a browser: a login page of this network, a proxy or a mirror (HF_ENDPOINT) may have "
            "answered instead of the Hub. Then start again"
        )
    return None


def _refused(
    key: str, spec: str, error: Exception | str, missing: Iterable[str] = ("every file needed",)
) -> ConfigError:
    from huggingface_hub import constants, errors

    if isinstance(error, errors.LocalEntryNotFoundError) and error.__cause__ is not None:
        error = error.__cause__
    why = one_line(error)
    name = spec.partition("@")[0]
    remedy = isinstance(error, Exception) and remedy_of(error, name)
    if not remedy:
        remedy = (
            f"Start again; if the Hub cannot be reached, run `hf download {name}` elsewhere and copy that cache here "
            "(its place is HF_HOME), or copy the model's folder here and name that"
        )
        if constants.HF_HUB_OFFLINE and isinstance(error, Exception):
            why = "HF_HUB_OFFLINE is set"
            remedy = f"Unset HF_HUB_OFFLINE. {remedy}"
    rule = f"no such folder (looked from {os.getcwd()}), nor is {listed(missing)} of the Hub's {spec} in "
    return ConfigError(
        key, spec, f"{rule}{constants.HF_HUB_CACHE}, and it cannot be downloaded: {why}", remedy
    )
