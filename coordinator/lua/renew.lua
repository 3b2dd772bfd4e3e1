-- ARGV: gateway id, lease_ms. Returns how many leases were renewed.
local now, found = now_ms(), 0
for _, id in ipairs(redis.call('SMEMBERS', key('gateway', ARGV[1]))) do
  local known = redis.call('HMGET', key('req', id), 'state', 'placed_ms')
  if not known[1] then
    redis.call('SREM', key('gateway', ARGV[1]), id)
  elseif known[1] ~= 'PLACED' or known[2] + UNCLAIMED_MS > now then
    redis.call('ZADD', key('leases'), now + tonumber(ARGV[2]), id)
    found = found + 1
  end
end
return found
