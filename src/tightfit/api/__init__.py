"""The Python API: one module per verb, a typed options object in, a typed result out.

Every verb raises `tightfit.core.errors.UserError` for what the caller can put right, and reports
long work to the `progress` callback of its options. Nothing here prints.
"""
