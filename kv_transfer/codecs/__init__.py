"""The codecs of KV bytes: levels from lossless to about 3 bits a value, chosen by a link's bandwidth."""
