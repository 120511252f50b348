"""The paper's three tables on a laptop: is VCPO as accurate as synchronous training, in less time?"""
