"""How fast is shardload, and beside what? ``python -m benchmarks --help``.

The folders, in the order of reading:

cases    what is compared: cells (layout, sharding, number of ranks) and the files
peers    how each way loads: shardload, what people use today, and the floor that a machine sets
remote   how ways that need different environments take turns in one run
runs     what is measured: the times of all cells, small loads, memory, several devices in a process, the cost of ``verify=``
reports  tables and the plot
throttle one machine as several nodes, with a file system and a network of known limits
fuzz     what comes of damaged files
gpu.py   one GPU: loads that are right, rates of copies, a stream beside a matrix product (``make gpu-check``)
planning the cost of planning alone; no file, no MPI, no devices
"""
