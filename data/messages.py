"""The rows of a source as it has them, read once more without a tokenizer."""

from dataclasses import dataclass

from data import layouts
from data.sources import find_parts, read_source
from utils import UserError


@dataclass
class SourceRow:
    """A row as its source has it: its key there, its content, all its columns."""

    row_id: int
    hash: str
    messages: list
    given: dict


def read_messages(source, columns=None, files=None):
    """Yield a `SourceRow` for every row of one source that has messages to train on.

    `row_id` and `hash` are those that `data.tokens.load_rows` gives; rows that it sets aside for
    their length or by their template are here, too. columns: as it takes them; files: what
    `find_parts` says, where it was asked before. Of a pair the chosen answer is read. Raises
    `UserError` behind the last row when none could be used.
    """
    columns = layouts.parse_columns(columns)
    notes = layouts.Notes()
    reason = "it holds none"
    rows = read_source(files or find_parts(source), source)
    for row_id, (_, given) in enumerate(rows):
        try:
            _, messages = layouts.read_row(given, columns, "chosen", notes)
        except layouts.Unusable as error:
            reason = error
            continue
        yield SourceRow(row_id, layouts.row_hash(messages), messages, given)
    if not notes.layouts:
        hint = layouts.known_layouts(notes)
        raise UserError(f"{source}: no row can be used ({reason}); {hint}")
