-- ARGV: hashes of prefixes (16 bytes each). Returns their holders, a line each.
local keys = {}
for first = 1, #ARGV[1], 16 do
  keys[#keys + 1] = KEYS[1] .. 'prefix:' .. string.sub(ARGV[1], first, first + 15)
end
local found = redis.call('MGET', unpack(keys))
for i = 1, #keys do found[i] = found[i] or '' end
return table.concat(found, '\n')
