"""The benchmark's ranks, with a way of gathering that takes the pieces in the wrong order."""

from benchmarks.peers import job, savers


def swapped(array, path, layout, spec, comm):
    other = comm.Split(0, -comm.rank)  # ranks in reverse
    savers.gather(array, path, layout, spec, other)
    other.Free()


if __name__ == "__main__":
    savers.SAVES["gather"] = swapped
    job.main()
