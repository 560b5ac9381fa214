"""Load a model directory into an engine, in four steps. Each step returns a record.

    open     `opened.open_model`        OpenedModel    configuration, and headers of weights
    choose   `backends.choose_backend`  ChosenBackend  the backend of the model
    plan     `fit.fitting_plan`         MemoryPlan     effective settings, and memory of all parts
    build    `engine.build_engine`      Engine         weights on the backend, and parts wired

`engine.load_engine` takes the steps. `parts.load_parts` also loads tokenizer, grammars and sampling
parameters. Only this room builds the parts of an engine. It imports no callers.
"""
