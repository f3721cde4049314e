"""Checkpoints: files, formats, writer, reader, export."""
