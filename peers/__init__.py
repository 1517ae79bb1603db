"""The peer daemon: enrolment, session, transports, trainer, data and models."""
