"""What is checked before a process starts, a file for each kind of input. Begin with `validate.py`.

Functions named `check_...`, and those that say that they refuse something, raise SettingError: a line for each thing
that is wrong, with the setting, its value and what to give instead.
"""
