"""Methods of one's own: `vargen verify methods:lookup`, or `pipe(prompt, accelerator=lookup)`."""

from lookup import Lookup
from typical import typical

from vargen.decoding import Accelerator, Jacobi, shared_noise, speculative_sampling

medusa_like = Accelerator("typical", Jacobi(16, "maximal"), typical, summary="accepts typical drafts", source="Cai et al. 2024")
lookup = Accelerator(
    "lookup", Lookup(), speculative_sampling, summary="copies the tokens that followed earlier", source="Saxena 2023"
)
lookup_shared = Accelerator("lookup-shared", Lookup(), shared_noise)
