"""AUTOMATIC1111's API, under /sdapi/v1: images, extras, what there is to choose from, settings, progress, interrupt.

Under /controlnet is that of its extension for ControlNets.  routes.py answers, translation.py turns requests into
options, extras.py enlarges, controlnet.py is the extension.
"""
