"""Federations of processes: certificates, SuperLink and SuperNodes, the app bundle, and checks of a device."""
