"""Jinja templates of generated kernels; a package so that wheels and editable installs carry the folder as ``graphdnn.codegen_templates``."""
