"""How do files of a climate model become a Dataset of xarray, in one call?

- `loading`: `concat`, a load, and `to_xarray`.
- `padded_index`: which rows a label means along an axis with padding.
"""
