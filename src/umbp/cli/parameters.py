"""What several commands take, in modules that load nothing heavy: whoever imports this starts no thread."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import click

from umbp.kinds import parse_size

if TYPE_CHECKING:
    _ParamType = click.ParamType[int]
else:
    _ParamType = click.ParamType  # generic in newer versions only


class SizeType(_ParamType):
    """Bytes: a whole number, or a number with a unit."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        text = str(value)
        try:
            return int(text) if re.fullmatch(r"[0-9]{1,20}", text) else parse_size(text)
        except ValueError as error:
            self.fail(f"it {error}", param, ctx)


SIZE = SizeType()
AS_JSON = click.option("--json", "as_json", is_flag=True, help="One JSON object instead of text.")
