"""Which sizes and rates decide how a load is done, and why these?

They change how fast a load is, never what is loaded. They must be the same on every rank of a job. Only tests use other ones.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tuning:
    """The sizes; the defaults were measured.

    Attributes
    ----------
    inline_nbytes : int
        Blocks up to this size are read by the thread that also calls MPI: passing one to another thread takes longer.
    min_chunk_nbytes : int
        Smaller chunks are read by `Source.read_into`, a block at a time. What Python does for each of them, also in batches,
        costs more than that one thread reads them all.
    batch_nbytes : int
        Small chunks are read, decoded and copied together, up to so many decoded bytes at a time. Large enough that what is
        done once for each batch does not count, small enough that a batch stays in the core's cache.
    batched_chunk_nbytes : int
        Larger chunks are read one by one: decoding one takes so long that the rest does not count.
    worth_sharing_nbytes : int
        Smaller blocks go to ranks of the same machine as messages: MPI delivers them in microseconds.
    small_nbytes : int
        The values of an array up to this size are sent to all ranks with its metadata. What the load of one costs beside its
        reads (each rank opens the file, all agree to start, parts are sent), 8 ms, is enough for that.
    small_decoded_nbytes, small_reads : int
        ... if its chunks (or shards), which one thread decodes, have at most so many bytes; and if it is read in at most so
        many chunks, or runs of the file.
    tiny_nbytes : int
        In place of `small_nbytes` if there is only one rank.
    small_total_nbytes : int
        Cap on the values of all arrays of a call that are sent so.
    block_nbytes, block_between_nodes_nbytes : int
        Cap on a block if all ranks are on one machine, and if they are not. Large enough that a read is efficient, small enough
        that reading and sending overlap. Inside a machine parts need no messages of their own; between machines there should
        be few messages.
    large_block_nbytes, large_blocks_per_rank : int
        Inside a machine, blocks of a large array are larger, up to the first number, if each rank then still has as many as
        the second: a block costs each rank that needs some of it a control message, and waking up for it.
    reader_nbytes : int
        On several nodes, fewest bytes for each rank that shares the reads: below that it costs more to open the file there than
        it helps.
    """

    inline_nbytes: int = 1 << 14
    min_chunk_nbytes: int = 1 << 12
    batch_nbytes: int = 1 << 20
    batched_chunk_nbytes: int = 1 << 17
    worth_sharing_nbytes: int = 1 << 16
    small_nbytes: int = 8 << 20
    small_decoded_nbytes: int = 2 << 20
    small_reads: int = 1024
    tiny_nbytes: int = 1 << 14
    small_total_nbytes: int = 8 << 20
    block_nbytes: int = 4 << 20
    large_block_nbytes: int = 16 << 20
    large_blocks_per_rank: int = 4
    block_between_nodes_nbytes: int = 16 << 20
    reader_nbytes: int = 2 << 20


_default = Tuning()


def default_tuning() -> Tuning:
    """The sizes that jobs go by."""
    return _default
