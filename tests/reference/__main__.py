"""`make reference`: write the files anew."""

from tests.reference import CASES, FOLDER, text

for name, overrides in CASES.items():
    (FOLDER / f"{name}.yaml").write_text(text(overrides), encoding="utf-8")
    print(FOLDER / f"{name}.yaml")
