"""What pyproject.toml cannot say: models.yaml stays at the top level, and is copied into the package that is built."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class WithModels(build_py):
    """Copies models.yaml; an editable install reads the one at the top level."""

    def run(self) -> None:
        """Build the package without what an earlier build left, then add the file."""
        if not self.editable_mode:
            shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()
        if not self.editable_mode:
            self.copy_file("models.yaml", str(Path(self.build_lib, "edgespec", "models.yaml")))


setup(cmdclass={"build_py": WithModels})
