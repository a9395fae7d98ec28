"""Pictures of plans and runs as inline SVG: one file each, over the toolkit in `svg`."""
