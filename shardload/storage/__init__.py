"""Where are the bytes? Objects that are read by ranges: local files, objects in stores. Nobody above sees a descriptor.

objects  `StoredObject`, what a reader of chunks needs to know of an object, `ObjectFolder`, objects by key, and `Ranges`;
         `WritableFolder`, how many ranks write a new one
block_cache  an object as a file for a library that seeks (HDF5), through blocks that are kept
local    files of this machine's file systems, folders of them, and which other files a file may refer to
remote   objects in S3, Google, Azure, on HTTP servers: `open_remote(url, storage options)`, a folder, then
         `.object()`; `RemoteObject.pin` is the version (size, ETag) that rank 0 tells the others, for `.object(pin)`
target       a new file or folder: a temporary name until all is there. `leftovers` says what a save that was killed left
new_folder   a new folder of files, or what comes into an old one
changes      a file that grows, so that a kill costs nothing; one append at a time
"""
