"""Files: atomic writes, reads of plain files, files of tensors, and checks of what a file contains."""
