"""Arrow files of data sets from the Hub or from ``datasets.save_to_disk``.

The ``datasets`` library finds, downloads and converts a data set; automoe reads the Arrow files.
"""

from __future__ import annotations

from pathlib import Path

from automoe.config.data_schema import DataConfig
from automoe.config.hub import SILENT_S, bound_waits, is_data_set, remedy_of
from automoe.errors import DataError, import_backend, one_line


def hub_files(data: DataConfig) -> dict[str, Path]:
    """Return name -> Arrow file of the data set's ``data.split``; sorted names give the row order.

    Args:
        data: ``path`` is a Hub id (``org/name``) or a directory that ``save_to_disk`` made.

    Raises:
        BackendError: ``datasets`` is not installed.
        DataError: ``data.split`` is a part of a split (``train[:10%]``) or missing in the data set,
            or ``datasets`` cannot load the data set.
    """
    remedy = "pip install datasets, or set data=parquet with data.path=FILES"
    datasets = import_backend("datasets", f"data.path={data.path}", remedy)
    # datasets keeps whole files on disk and a slice in memory, so a slice has no files of its own.
    if "[" in data.split:
        raise DataError(
            f"{data.path}: data.split={data.split} is a part of a split. Name the whole split; data.max_bytes cuts it."
        )
    folder = Path(data.path or "").expanduser()
    try:
        if folder.is_dir() and is_data_set(str(folder)):
            loaded = datasets.load_from_disk(str(folder))
            if isinstance(loaded, datasets.DatasetDict):
                loaded = loaded[data.split]
        else:
            bound_waits()
            loaded = datasets.load_dataset(str(data.path), data.subset, split=data.split)
    except KeyError as error:
        raise DataError(
            f"{folder}: it has no split {error}; its splits are {', '.join(loaded)}. Set data.split."
        ) from error
    # datasets raises errors of many types: its own, those of requests, those of builders.
    except Exception as error:
        raise DataError(_reason(data, error, datasets.config.HF_HUB_OFFLINE)) from error
    files = [Path(file["filename"]) for file in loaded.cache_files]
    return {f"{place:05d}-{path.name}": path for place, path in enumerate(files)}


def _reason(data: DataConfig, error: Exception, offline: bool) -> str:
    from huggingface_hub import HfApi

    there = Path(data.path or "").expanduser().exists()
    absent = "" if there else f"nothing there (looked from {Path.cwd()}), and "
    problem = f"{data.path}: {absent}datasets cannot load it ({one_line(error)})."
    unreached = isinstance(error, ConnectionError)
    cause = None if there or offline else error
    if cause and unreached:  # datasets drops the reason
        try:
            HfApi().dataset_info(str(data.path), timeout=SILENT_S)
        except Exception as reason:
            cause = reason
    while cause is not None:
        if remedy := remedy_of(cause, f"datasets/{data.path}"):
            return f"{problem} ({one_line(cause)}) {remedy}."
        cause = cause.__cause__ or cause.__context__
    if not there and (offline or unreached):
        return (
            f"{problem} The Hub is out of reach from here, or HF_HUB_OFFLINE is set: on a machine with network, save it "
            f"with datasets.load_dataset({data.path!r}, split={data.split!r}).save_to_disk(DIR), and set data.path=DIR."
        )
    return f"{problem} Correct data.path, data.subset or data.split."
