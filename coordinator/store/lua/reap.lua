-- ARGV: holder, corpse_kept_ms. Returns {request id, epoch, gateway id} of each request that was ended.
local now, ended = now_ms(), {}
-- A call that waited here while Redis stood still comes from before: nobody had the time to say that he lives.
if redis.call('GET', key('leader')) ~= ARGV[1] then return ended end
for _, id in ipairs(redis.call('ZRANGEBYSCORE', key('leases'), '-inf', now, 'LIMIT', 0, 1000)) do
  local request = read(key('req', id))
  if request.state and not ENDS[request.state] then
    enter(id, request, 'FAILED', request.epoch)
    redis.call('HSET', key('req', id), 'reaped', '1')
    count('reaped')
    ended[#ended + 1] = {id, tonumber(request.epoch), request.gateway}
  end
  redis.call('ZREM', key('leases'), id)
end
for _, id in ipairs(worker_ids()) do
  local node = key('node', id)
  if redis.call('EXISTS', key('node', id, 'alive')) == 0 then
    local died = redis.call('HGET', node, 'died')
    if not died then
      redis.call('HSET', node, 'term', '0', 'died', now, 'pending', 0, 'prefills', 0, 'reserved', 0,
        'decodes', 0, 'answers', 0)
      redis.call('DEL', key('node', id, 'prefixes'))
      count('buried')
    elseif tonumber(died) + tonumber(ARGV[2]) <= now then
      redis.call('DEL', node)
      redis.call('ZREM', key('nodes'), id)
    end
  end
end
return ended
