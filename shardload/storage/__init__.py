"""Where are the bytes? Objects that are read by ranges: local files now; above this room nobody sees a descriptor.

objects  `StoredObject`, what a reader of chunks needs to know of an object, and `Ranges`, several pieces of one
local    files of this machine's file systems
"""
