"""What do the stored numbers mean? The rules by which attributes turn them into values: NumPy and the standard library only.

decoding  from a file's attributes to a `Decoding`, which turns blocks of stored numbers into values
dates     from a date, and the units and calendar of an axis, to the number of that axis
"""
