-- ARGV: hashes of prefixes, and keys of blocks (16 bytes each). Returns their holders, a line each.
local keys = {}
for i, kind in ipairs({'prefix:', 'held:'}) do
  for first = 1, #ARGV[i], 16 do
    keys[#keys + 1] = KEYS[1] .. kind .. string.sub(ARGV[i], first, first + 15)
  end
end
local found = redis.call('MGET', unpack(keys))
for i = 1, #keys do found[i] = found[i] or '' end
return table.concat(found, '\n')
