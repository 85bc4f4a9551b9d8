import csv
from collections.abc import Iterator
from pathlib import Path

from automoe.data.corpora import Source
from automoe.errors import DataError


def read(path: Path, text_key: str) -> Iterator[tuple[int, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        for record in (rows := csv.DictReader(file)):
            if record.get(text_key) is None:
                raise DataError(f"{path}:{rows.line_num}: no column {text_key!r}. Set data.text_key")
            yield rows.line_num, record[text_key]


CSV = Source("*.csv", read)
