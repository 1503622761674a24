"""What a program sees of itself; without torch."""

import json
import os
import pickle
import sys


class Thing:
    pass


main = sys.modules["__main__"]
names = {name: str(value) for name, value in vars(main).items() if name.startswith("__") and name != "__builtins__"}
seen = {"names": names, "argv": sys.argv, "path": sys.path[0], "main": main.__dict__ is globals()}
seen["pickles"] = type(pickle.loads(pickle.dumps(Thing()))) is Thing
if os.environ.get("RANK", "0") == "0":
    sys.stdout.write(json.dumps(seen, sort_keys=True) + "\n")
