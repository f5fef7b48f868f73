"""Memory and communication per rank from the configuration alone: no model, no process group.

`shapes` says which parameters a rank holds, `static` what is kept between steps (exact),
`estimates` what a forward-backward pass keeps (an estimate), `traffic` what crosses ranks, and
`report` puts them together for `megatron-logra plan`.
"""

from megatron_logra.planner.shapes import Layout, Shape, parameter_shapes
from megatron_logra.planner.static import static_memory

__all__ = ["Layout", "Shape", "parameter_shapes", "static_memory"]
