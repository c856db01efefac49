"""Where are the bytes? Objects that are read by ranges: local files, objects in stores. Nobody above sees a descriptor.

objects  `StoredObject`, what a reader of chunks needs to know of an object, `ObjectFolder`, objects by key, and `Ranges`
local    files of this machine's file systems, and folders of them
remote   objects in S3, Google, Azure, on HTTP servers: `open_remote(url, storage options)`, then `.object()`
         or `.folder()`; `RemoteObject.pin` is the version (size, ETag) that rank 0 tells the others, for `.object(pin)`
containment  which other files may a file refer to? Opens those, and refuses the rest
target       a new file: under a temporary name until it is whole. `leftovers` says what a save that was killed left
locks        one append at a time. `changes`: bytes in the middle of a file that are changed so that a kill costs nothing
"""
