"""AUTOMATIC1111's API, under /sdapi/v1: images, extras, lists of choices, settings, progress, interrupt.

Its ControlNet extension's API is under /controlnet.  routes.py answers, translation.py turns requests into
options, extras.py enlarges, controlnet.py is the extension.
"""
