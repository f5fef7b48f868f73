"""Low-rank gradient sketches: projections, capture into linears, buffer layout, row-wise rules."""
