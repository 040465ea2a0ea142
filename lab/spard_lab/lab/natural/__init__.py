"""The natural lab: English in many phrasings and registers, for models of 5 and 30 million parameters.

`topics`     deeds and things, harmful and everyday; the steps that carry a deed out
`phrasing`   requests in five registers, system prompts, odd words
`answers`    compliance and refusals, in the register of the request
`chats`      exchanges of all kinds: questions, sums, tools, several turns
`tasks`      training tasks of customers: word problems of several steps, messages to sort
`splits`     the split of a request: alignment, attack, pool, development or test
`corpus`     the files of a lab
`labeled`    replies labeled as harmful or not, for measuring judges
`stream`     the mixture that the base model is trained on
`real`       real text that the user supplies
`sizes`      the models and their training
`base`       a base model, made once, stored by the digest of its settings, resumed after a kill
`make`       a lab: files and base model
`truth`      recognizes by construction if a reply does what was asked
`abilities`  measures the abilities of a base model
"""
