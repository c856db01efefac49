"""How do stored bytes become values, and values such bytes? With well-maintained libraries, outside a format's lock.

table        one object for each codec: its names and numbers, whether it is safe on damaged data, how it decodes and encodes;
             how a caller says how an array is compressed
algorithms   shuffle, byte order, checksums; gzip, zlib, Zstandard, Blosc, LZ4; the codecs of one array, one after the other
"""
