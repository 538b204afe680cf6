"""Text as bytes, and batches of it: corpora, files on disk, packed documents, parts of hosts."""
