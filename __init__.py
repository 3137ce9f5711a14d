"""Makes `import vargen` work in the folder that holds this clone, where Python finds the clone before the installed package."""

from pathlib import Path

_ROOT = Path(__file__).resolve().parent
__path__ = [str(_ROOT / "vargen"), str(_ROOT)]  # the second has pipelines, kernels and assets
__file__ = str(_ROOT / "vargen" / "__init__.py")
exec(compile(Path(__file__).read_text("utf-8"), __file__, "exec"))
