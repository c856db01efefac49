"""What is a file format? What each must implement, and what helps to do so.

array         what is known of an array: its type, its names (`Labels`), `ArrayInfo`, `Properties`
format        `Format`, `OpenFile`, `Source`: what a format implements
chunk_reader  reads and decodes stored chunks in several threads, or a region chunk by chunk
"""
