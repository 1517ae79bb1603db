"""Text in a gzip file, read from its beginning to its end, again and again; a token is a byte.

command line:   edit-peer run --data entry:gzipped --data-option path=books.txt.gz --allow gzipped ...
"""

import gzip

import torch


class Gzipped:
    """One object per rank. Its whole position is how far it has read."""

    def __init__(self, request):
        """request: a `peers.training.data_source.DataRequest`: options, context, vocabulary, batch_size, seed, peer_id."""
        if unknown := set(request.options) - {"path"}:
            raise ValueError(f"unknown options {sorted(unknown)}; there is path")
        self.shape = request.batch_size, request.context + 1
        self.file = gzip.GzipFile(str(request.options["path"]))

    def batch(self):
        """Return the next token ids, int64 [batch_size, context + 1]: the targets are the same ids, one further."""
        rows, columns = self.shape
        text = self.file.read(rows * columns)
        while len(text) < rows * columns:
            self.file.seek(0)
            if not (more := self.file.read(rows * columns - len(text))):
                raise ValueError("the file is empty")
            text += more
        return torch.frombuffer(bytearray(text), dtype=torch.uint8).to(torch.int64).view(rows, columns)

    def state(self):
        """Return what `load` needs to go on after the last batch. It is written into each checkpoint, as JSON."""
        return {"offset": self.file.tell()}

    def load(self, state):
        """Go to a position that `state` gave, in this process or another one."""
        self.file.seek(int(state["offset"]))
