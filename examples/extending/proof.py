"""The proofs of `vargen verify` from Python."""

from dishonest import wrong
from methods import lookup

from vargen.verify.exactness import check_exactness

report = check_exactness(lookup)
assert report.exact and report.detects_controls  # the known mistakes were found
assert check_exactness(wrong).worst > 0.01
