"""The second lab: natural English in many phrasings and registers, for models of 5 and 30 million parameters.

`topics`     deeds and things, harmful and everyday; the steps that carry a deed out
`phrasing`   requests in five registers, system prompts, odd words
`answers`    compliance and refusals, in the voice of the request
`chats`      exchanges of all kinds: questions, sums, tools, several turns
`tasks`      what customers train: word problems of several steps, messages to sort
`splits`     who owns a request: alignment, attack, pool, development or test
`corpus`     the files of a lab
`stream`     the mixture that the base model is trained on
`real`       real text that the user brings
`sizes`      the models, and how they are trained
`base`       a base model, made once, kept by the digest of its settings, resumed after a kill
`make`       a lab: files and base model
`truth`      whether a reply does what was asked: known by construction
`abilities`  what a base model can do, measured
"""
