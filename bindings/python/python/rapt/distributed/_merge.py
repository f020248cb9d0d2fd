"""Partial results of rows, each with its lse, put together: out = Σ out_n · exp(lse_n - lse), lse = log Σ exp(lse_n).

In the accumulation dtype, one after another in the order in which `add` is called, so that the bits follow from that order. Rows of which
every part is dead stay zeros with lse = -inf.
"""

import torch


def accumulation(dtype):
    """float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class Merged:
    """What is known so far of the rows [batch, heads, len, head_dim_v]."""

    def __init__(self, sizes, dtype, device):
        self.sizes, self.dtype, self.device = sizes, dtype, device
        self.out = self.lse = None
        self._written = []

    @property
    def out_dtype(self):
        """Of what `add` is given."""
        return self.dtype if self.out is None else self.out.dtype

    def start(self, into=None, is_whole=False):
        """Every row dead, in memory of its own, or in `into` of any dtype, where no row will have two parts. is_whole: each will have one."""
        if self.out is None:
            self.out = torch.empty(self.sizes, dtype=self.dtype, device=self.device) if into is None else into
            self.lse = torch.empty(self.sizes[:-1], dtype=self.dtype, device=self.device)
            if not is_whole:
                self.out.zero_()
                self.lse.fill_(-torch.inf)

    def heads(self, heads):
        """The same rows of some heads, to add to. Not before `start`."""
        some = Merged((self.sizes[0], heads.stop - heads.start, *self.sizes[2:]), self.dtype, self.device)
        some.out, some.lse = self.out[:, heads], self.lse[:, heads]
        return some

    def place(self, rows):
        """Where the first part of the rows (start, stop) can be written: None where they have had one, or memory is none yet."""
        is_first = self.out is not None and all(rows[1] <= start or stop <= rows[0] for start, stop in self._written)
        return self.out[:, :, rows[0] : rows[1]] if is_first else None

    def add(self, rows, out, lse):
        """One more part of the rows (start, stop). `out` is what `place` gave, or else is kept or written, as `lse` is."""
        if self.out is None and rows == (0, self.sizes[2]):
            self.out, self.lse = out, lse
            self._written.append(rows)
            return
        self.start()
        into, sums = self.place(rows), self.lse[:, :, rows[0] : rows[1]]
        if into is not None:
            sums.copy_(lse)
            if into.data_ptr() != out.data_ptr():
                into.copy_(out)
        else:
            into = self.out[:, :, rows[0] : rows[1]]
            total = torch.logaddexp(sums, lse)
            into.mul_(_weights(sums, total)).addcmul_(out, _weights(lse, total))
            sums.copy_(total)
        self._written.append(rows)

    def finish(self, sinks=None):
        """(out, lse) with the sinks of heads in the denominator: in the accumulation dtype, but out in the dtype of the memory that `start` got. A dead row
        stays dead beside a sink."""
        self.start()
        if sinks is not None:
            total = torch.logaddexp(self.lse, sinks.to(self.dtype)[None, :, None])
            total = torch.where(self.lse == -torch.inf, self.lse, total)
            self.out.mul_(_weights(self.lse, total))
            self.lse = total
        return self.out, self.lse


def _weights(lse, total):
    """exp(lse - total), 0 of rows that are dead so far."""
    return torch.exp(lse - total).masked_fill_(total == -torch.inf, 0).unsqueeze(-1)
